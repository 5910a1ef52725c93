/* The ring loop in plain C: one writer, readers, each a process, 32-byte descriptors in shared memory,
 * batches. The writer publishes with a release store, then a full fence and a look at the `waiting` flag;
 * a reader checks every word of every descriptor, and releases its cursor. The writer waits for all.
 *
 *     ring FRAMES BATCH COUNT WRITER_CPU READER_CPU …      prints: descriptors seconds wrong
 *
 * Readers that share a CPU yield it when there is nothing to read; else they spin.
 */
#include "common.h"

#define MAX_READERS 8

typedef struct {
    word published, waiting, cursors[MAX_READERS];
    _Alignas(4096) descriptor frames[];
} ring;

static int64_t lowest_cursor(ring *r, int readers) {
    int64_t lowest = INT64_MAX;
    for (int i = 0; i < readers; i++) {
        int64_t cursor = atomic_load_explicit(&r->cursors[i].value, memory_order_acquire);
        lowest = cursor < lowest ? cursor : lowest;
    }
    return lowest;
}

static void write_all(ring *r, int64_t frames, int64_t batch, int64_t count, int readers) {
    int64_t mask = frames - 1, gate = 0;
    for (int64_t head = 0; head < count; head += batch) {
        while (head + batch + 1 - frames > gate) { /* one frame stays free, as in ours */
            spin_hint();
            gate = lowest_cursor(r, readers);
        }
        for (int64_t n = head; n < head + batch; n++)
            r->frames[n & mask] = describe(n, frames);
        atomic_store_explicit(&r->published.value, head + batch, memory_order_release);
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load_explicit(&r->waiting.value, memory_order_relaxed))
            atomic_store_explicit(&r->waiting.value, 0, memory_order_relaxed);
    }
}

static int64_t read_all(ring *r, int64_t frames, int64_t count, int reader, int crowded) {
    int64_t mask = frames - 1, cursor = 0, wrong = 0;
    while (cursor < count) {
        int64_t most = atomic_load_explicit(&r->published.value, memory_order_acquire) - cursor;
        if (most > frames / 2)
            most = frames / 2;
        if (most == 0) {
            if (crowded)
                sched_yield();
            else
                spin_hint();
            continue;
        }
        for (int64_t n = cursor; n < cursor + most; n++)
            wrong += is_wrong(&r->frames[n & mask], n, frames);
        cursor += most;
        atomic_store_explicit(&r->cursors[reader].value, cursor, memory_order_release);
    }
    return wrong;
}

int main(int argc, char **argv) {
    int readers = argc - 5, crowded = 0, status = 0;
    if (readers < 1 || readers > MAX_READERS)
        return 2;
    for (int i = 1; i < readers; i++)
        crowded |= argument(argv, 5 + i) == argument(argv, 4 + i);
    int64_t frames = argument(argv, 1), batch = argument(argv, 2), count = argument(argv, 3);
    ring *r = shared(sizeof(ring) + frames * sizeof(descriptor));
    pid_t writer = fork_on(argument(argv, 5), argument(argv, 4));
    if (writer == 0) {
        write_all(r, frames, batch, count, readers);
        _exit(0);
    }
    for (int i = 1; i < readers; i++)
        if (fork_on(argument(argv, 5), argument(argv, 5 + i)) == 0)
            _exit(read_all(r, frames, count, i, crowded) != 0);
    while (atomic_load_explicit(&r->published.value, memory_order_acquire) == 0)
        spin_hint();
    int64_t begin = now_ns();
    int64_t wrong = read_all(r, frames, count, 0, crowded);
    for (int i = 0; i < readers; i++) /* the writer and the other readers */
        wait(&status), wrong += status != 0;
    int64_t end = now_ns();
    printf("%ld %.9f %ld\n", count, (end - begin) / 1e9, wrong);
    return 0;
}
