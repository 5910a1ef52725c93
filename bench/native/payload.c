/* The stream with payloads, by the whole protocol: the writer copies each in, the reader sums all its bytes.
 *
 *     payload FRAMES ARENA_BYTES BATCH COUNT SIZE WRITER_CPU READER_CPU      prints: frames seconds wrong
 */
#include "protocol.h"

static void write_all(writer *w, int64_t batch, int64_t count, int64_t size) {
    int64_t stride = stride_of(size), kind = 0;
    while (w->head < count) {
        if (!reserve(w, batch, batch * stride)) {
            spin_hint();
            continue;
        }
        int64_t position = w->position;
        for (int64_t i = 0; i < batch; i++) {
            position = put(w, i, position, size, payloads[kind]);
            kind = kind + 1 < KINDS ? kind + 1 : 0;
        }
        publish(w, batch, position, batch * size);
    }
}

static int64_t read_all(reader *r, int64_t count, int64_t size) {
    int64_t wrong = 0;
    while (r->cursor < count) {
        int64_t frames = poll(r), kind = r->cursor % KINDS;
        if (frames == 0) {
            spin_hint();
            continue;
        }
        for (int64_t n = r->cursor; n < r->cursor + frames; n++) {
            wrong += is_wrong_at(&r->ring, n, size, sums[kind]);
            kind = kind + 1 < KINDS ? kind + 1 : 0;
        }
        release(r, frames);
    }
    return wrong;
}

int main(int argc, char **argv) {
    if (argc != 8)
        return 2;
    int64_t batch = argument(argv, 3), count = argument(argv, 4), size = argument(argv, 5);
    if (size < 4 || size > MAX_SIZE || size % 4 != 0)
        return 2;
    make_payloads(size);
    ring shared_ring = new_ring(argument(argv, 1), argument(argv, 2));
    pid_t child = fork_on(argument(argv, 7), argument(argv, 6));
    if (child == 0) {
        write_all(&(writer){.ring = shared_ring}, batch, count, size);
        _exit(0);
    }
    while (atomic_load_explicit(&shared_ring.control->published.value, memory_order_acquire) == 0)
        spin_hint();
    int64_t begin = now_ns();
    int64_t wrong = read_all(&(reader){.ring = shared_ring}, count, size);
    int64_t end = now_ns();
    waitpid(child, NULL, 0);
    printf("%ld %.9f %ld\n", count, (end - begin) / 1e9, wrong);
    return 0;
}
