/* A plain recvmmsg loop: batches into fixed buffers. With TIMESTAMPS it finds each packet's kernel time
 * (the socket must ask for SO_TIMESTAMPNS) and takes one time a batch to compare with, as the engine does.
 *
 *     receive FD CPU BATCH TIMESTAMPS SIZE WARM_NS WINDOW_NS      prints: packets seconds cpu_seconds wrong
 *
 * FD is a bound, blocking UDP socket. Packets are counted for WINDOW_NS, from WARM_NS after the first on;
 * wrong are those that are not SIZE bytes long, or that lack their time.
 */
#include "common.h"
#include <sys/socket.h>

#define MAX_BATCH 1024
#define BUFFER_BYTES 2048
#define CONTROL_BYTES 64

static char buffers[MAX_BATCH][BUFFER_BYTES];
static _Alignas(8) char controls[MAX_BATCH][CONTROL_BYTES];
static struct iovec iovecs[MAX_BATCH];
static struct mmsghdr messages[MAX_BATCH];

/* The kernel's time of a message, or 0. */
static int64_t kernel_ns(struct msghdr *message) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c != NULL; c = CMSG_NXTHDR(message, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec *t = (struct timespec *)CMSG_DATA(c);
            return (int64_t)t->tv_sec * 1000000000 + t->tv_nsec;
        }
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 8)
        return 2;
    int fd = argument(argv, 1), batch = argument(argv, 3), timestamps = argument(argv, 4);
    int64_t size = argument(argv, 5), warm_ns = argument(argv, 6), window_ns = argument(argv, 7);
    int64_t packets = 0, wrong = 0, socket_ns = 0, begin = 0, now = 0, cpu_ns = 0;
    if (batch < 1 || batch > MAX_BATCH)
        return 2;
    pin(argument(argv, 2));
    for (int i = 0; i < batch; i++) {
        iovecs[i] = (struct iovec){buffers[i], BUFFER_BYTES};
        messages[i].msg_hdr.msg_iov = &iovecs[i];
        messages[i].msg_hdr.msg_iovlen = 1;
        messages[i].msg_hdr.msg_control = timestamps ? controls[i] : NULL;
    }
    for (;;) {
        for (int i = 0; timestamps && i < batch; i++)
            messages[i].msg_hdr.msg_controllen = CONTROL_BYTES; /* the kernel shrinks it */
        int taken = recvmmsg(fd, messages, batch, MSG_WAITFORONE, NULL);
        if (taken < 0) {
            perror("recvmmsg");
            return 1;
        }
        now = now_ns();
        if (begin == 0)
            begin = now + warm_ns;
        if (timestamps) {
            int64_t received_ns = clock_ns(CLOCK_REALTIME);
            for (int i = 0; i < taken; i++) {
                int64_t time_ns = kernel_ns(&messages[i].msg_hdr);
                wrong += time_ns == 0;
                socket_ns += received_ns - time_ns;
            }
        }
        for (int i = 0; i < taken; i++)
            wrong += messages[i].msg_len != size;
        if (cpu_ns != 0)
            packets += taken;
        else if (now >= begin)
            begin = now, cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
        if (now >= begin + window_ns)
            break;
    }
    cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns;
    printf("%ld %.9f %.9f %ld\n", packets, (now - begin) / 1e9, cpu_ns / 1e9, wrong + (socket_ns < 0));
    return 0;
}
