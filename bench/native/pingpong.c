/* Round trips between two CPUs by shared memory, both ends spinning.
 *
 *     pingpong raw|ring ROUNDS CPU_A CPU_B      prints: rounds seconds wrong
 *
 * raw: one word each way, the least there is. ring: each way a descriptor is written, a published word
 * stored (release), seen by the other (acquire), and every word of the descriptor checked.
 */
#include "common.h"
#include <string.h>

#define FRAMES 16384

typedef struct {
    word published;
    _Alignas(4096) descriptor frames[FRAMES];
} lane;

static void await(word *w, int64_t value) {
    while (atomic_load_explicit(&w->value, memory_order_acquire) != value)
        spin_hint();
}

static void send_raw(lane *to, int64_t n) {
    atomic_store_explicit(&to->published.value, n + 1, memory_order_release);
}

static void send_ring(lane *to, int64_t n) {
    to->frames[n % FRAMES] = describe(n, FRAMES);
    send_raw(to, n);
}

static int64_t take_ring(lane *from, int64_t n) {
    await(&from->published, n + 1);
    return is_wrong(&from->frames[n % FRAMES], n, FRAMES);
}

int main(int argc, char **argv) {
    if (argc != 5)
        return 2;
    int raw = strcmp(argv[1], "raw") == 0;
    int64_t rounds = argument(argv, 2), wrong = 0, begin = 0, warm = FRAMES;
    lane *there = shared(2 * sizeof(lane)), *back = there + 1;
    pid_t other = fork_on(argument(argv, 3), argument(argv, 4));
    for (int64_t n = 0; n < warm + rounds; n++) {
        if (n == warm)
            begin = now_ns();
        if (other == 0) {
            if (raw)
                await(&there->published, n + 1), send_raw(back, n);
            else
                wrong += take_ring(there, n), send_ring(back, n);
        } else {
            if (raw)
                send_raw(there, n), await(&back->published, n + 1);
            else
                send_ring(there, n), wrong += take_ring(back, n);
        }
    }
    int64_t end = now_ns();
    if (other == 0)
        _exit(wrong != 0);
    int status = 0;
    waitpid(other, &status, 0);
    printf("%ld %.9f %ld\n", rounds, (end - begin) / 1e9, wrong + (status != 0));
    return 0;
}
