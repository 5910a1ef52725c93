/* One number handed over at a fixed pace, and how long it takes until the other CPU has it.
 *
 *     handover word|futex COUNT PERIOD_NS WRITER_CPU READER_CPU
 *     prints: count p50_ns p99_ns max_ns wrong reader_cpu_ns writer_cpu_ns
 *
 * word: the reader spins. futex: it sleeps on the word, and each store is followed by a wake. The writer
 * spins until a number is due; its CPU time is that of the stores and wakes.
 */
#include "common.h"
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>

#define SLOTS 4096
#define LEAD_NS 10000000 /* the reader waits by then */

typedef struct {
    _Alignas(LINE) _Atomic uint32_t published;
    struct {
        _Alignas(LINE) int64_t number, time_ns;
    } slots[SLOTS];
} lane;

static int64_t write_all(lane *l, int64_t count, int64_t period_ns, int wake) {
    int64_t due = now_ns() + LEAD_NS, cpu_ns = 0;
    for (int64_t n = 0; n < count; n++, due += period_ns) {
        while (now_ns() < due)
            spin_hint();
        int64_t before = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        l->slots[n % SLOTS].number = n;
        l->slots[n % SLOTS].time_ns = now_ns();
        atomic_store_explicit(&l->published, n + 1, memory_order_release);
        if (wake)
            syscall(SYS_futex, &l->published, FUTEX_WAKE, 1, NULL, NULL, 0);
        cpu_ns += clock_ns(CLOCK_THREAD_CPUTIME_ID) - before;
    }
    return cpu_ns;
}

static int64_t read_all(lane *l, int64_t count, int64_t *latencies, int sleep) {
    int64_t n = 0, wrong = 0;
    while (n < count) {
        uint32_t published = atomic_load_explicit(&l->published, memory_order_acquire);
        if (published == n) {
            if (sleep)
                syscall(SYS_futex, &l->published, FUTEX_WAIT, published, NULL, NULL, 0);
            else
                spin_hint();
            continue;
        }
        for (int64_t now = now_ns(); n < published; n++) {
            latencies[n] = now - l->slots[n % SLOTS].time_ns;
            wrong += l->slots[n % SLOTS].number != n || latencies[n] < 0;
        }
    }
    return wrong;
}

static int ascending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    int futex = strcmp(argv[1], "futex") == 0;
    int64_t count = argument(argv, 2);
    lane *l = shared(sizeof(lane));
    int64_t *writer_cpu_ns = shared(4096), *latencies = shared(count * sizeof(int64_t));
    pid_t child = fork_on(argument(argv, 5), argument(argv, 4));
    if (child == 0) {
        *writer_cpu_ns = write_all(l, count, argument(argv, 3), futex);
        _exit(0);
    }
    int64_t cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    int64_t wrong = read_all(l, count, latencies, futex);
    cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns;
    waitpid(child, NULL, 0);
    qsort(latencies, count, sizeof(int64_t), ascending);
    printf("%ld %ld %ld %ld %ld %ld %ld\n", count, latencies[count / 2], latencies[count * 99 / 100],
           latencies[count - 1], wrong, cpu_ns, *writer_cpu_ns);
    return 0;
}
