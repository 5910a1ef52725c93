/* A plain recvmmsg loop: batches into fixed buffers. With TIMESTAMPS it finds each message's kernel time
 * (the socket must ask for SO_TIMESTAMPNS) and takes one time a batch to compare with, as the engine does.
 * With GRO a message may be many packets (the socket must ask for UDP_GRO).
 *
 *     receive FD CPU BATCH TIMESTAMPS GRO SIZE WARM_NS WINDOW_NS      prints: packets seconds cpu_seconds wrong
 *
 * FD is a bound, blocking UDP socket. Packets are counted for WINDOW_NS, from WARM_NS after the first on;
 * wrong are messages whose packets are not SIZE bytes long, or that lack their time.
 */
#include "common.h"
#include <sys/socket.h>
#ifndef SOL_UDP
#define SOL_UDP 17
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

#define MAX_BATCH 1024
#define BUFFER_BYTES 65536
#define CONTROL_BYTES 64

static char buffers[MAX_BATCH][BUFFER_BYTES]; /* of each, only the pages that messages reach exist */
static _Alignas(8) char controls[MAX_BATCH][CONTROL_BYTES];
static struct iovec iovecs[MAX_BATCH];
static struct mmsghdr messages[MAX_BATCH];

/* The kernel's time of a message, or 0; the size of its packets where there are several, or 0. */
static int64_t kernel_ns(struct msghdr *message, int *segment) {
    int64_t time_ns = 0;
    *segment = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c != NULL; c = CMSG_NXTHDR(message, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec *t = (struct timespec *)CMSG_DATA(c);
            time_ns = (int64_t)t->tv_sec * 1000000000 + t->tv_nsec;
        } else if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO)
            *segment = *(int *)CMSG_DATA(c);
    return time_ns;
}

int main(int argc, char **argv) {
    if (argc != 9)
        return 2;
    int fd = argument(argv, 1), batch = argument(argv, 3);
    int timestamps = argument(argv, 4), gro = argument(argv, 5), ancillary = timestamps | gro;
    int64_t size = argument(argv, 6), warm_ns = argument(argv, 7), window_ns = argument(argv, 8);
    int64_t packets = 0, wrong = 0, socket_ns = 0, begin = 0, now = 0, cpu_ns = 0;
    if (batch < 1 || batch > MAX_BATCH)
        return 2;
    pin(argument(argv, 2));
    for (int i = 0; i < batch; i++) {
        iovecs[i] = (struct iovec){buffers[i], BUFFER_BYTES};
        messages[i].msg_hdr.msg_iov = &iovecs[i];
        messages[i].msg_hdr.msg_iovlen = 1;
        messages[i].msg_hdr.msg_control = ancillary ? controls[i] : NULL;
    }
    for (;;) {
        for (int i = 0; ancillary && i < batch; i++)
            messages[i].msg_hdr.msg_controllen = CONTROL_BYTES; /* the kernel shrinks it */
        int taken = recvmmsg(fd, messages, batch, MSG_WAITFORONE, NULL);
        if (taken < 0) {
            perror("recvmmsg");
            return 1;
        }
        now = now_ns();
        if (begin == 0)
            begin = now + warm_ns;
        int64_t received_ns = timestamps ? clock_ns(CLOCK_REALTIME) : 0, came = 0;
        for (int i = 0; i < taken; i++) {
            int segment = 0;
            if (ancillary) {
                int64_t time_ns = kernel_ns(&messages[i].msg_hdr, &segment);
                wrong += timestamps && time_ns == 0;
                socket_ns += received_ns - time_ns;
            }
            came += messages[i].msg_len / size;
            wrong += segment == 0 ? messages[i].msg_len != size : segment != size || messages[i].msg_len % size;
        }
        if (cpu_ns != 0)
            packets += came;
        else if (now >= begin)
            begin = now, cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
        if (now >= begin + window_ns)
            break;
    }
    cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns;
    printf("%ld %.9f %.9f %ld\n", packets, (now - begin) / 1e9, cpu_ns / 1e9, wrong + (timestamps && socket_ns < 0));
    return 0;
}
