/* Round trips between two CPUs by shared memory, both ends spinning.
 *
 *     pingpong raw|ring|protocol|payload ROUNDS CPU_A CPU_B      prints: rounds seconds wrong
 *
 * raw: one word each way, the least there is. ring: each way a descriptor is written, a published word
 * stored (release), seen by the other (acquire), and every word of the descriptor checked. protocol: each
 * way all that a ring does for a frame (protocol.h); payload: the same, and 128 bytes copied in and summed.
 */
#include "protocol.h"

#define FRAMES 16384
#define SIZE 128

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

static void send_frame(writer *w, int64_t n, int payload) {
    while (!reserve(w, 1, SIZE))
        spin_hint();
    publish(w, 1, put(w, 0, w->position, SIZE, payload ? payloads[n % KINDS] : NULL), SIZE);
}

static int64_t take_frame(reader *r, int64_t n, int payload) {
    while (poll(r) == 0)
        spin_hint();
    return is_wrong_at(&r->ring, n, SIZE, payload ? sums[n % KINDS] : -1);
}

/* The least, or a descriptor; the nanoseconds of `rounds`. */
static int64_t short_trips(int first, lane *there, lane *back, int64_t rounds, int raw, int64_t *wrong) {
    int64_t begin = 0;
    for (int64_t n = 0; n < FRAMES + rounds; n++) {
        if (n == FRAMES)
            begin = now_ns();
        if (!first) {
            if (raw)
                await(&there->published, n + 1), send_raw(back, n);
            else
                *wrong += take_ring(there, n), send_ring(back, n);
        } else {
            if (raw)
                send_raw(there, n), await(&back->published, n + 1);
            else
                send_ring(there, n), *wrong += take_ring(back, n);
        }
    }
    return now_ns() - begin;
}

/* The whole protocol; releases after the answer, as bench/ring.py does. */
static int64_t whole_trips(int first, ring there, ring back, int64_t rounds, int payload, int64_t *wrong) {
    writer w = {.ring = first ? there : back};
    reader r = {.ring = first ? back : there};
    int64_t begin = 0;
    for (int64_t n = 0; n < FRAMES + rounds; n++) {
        if (n == FRAMES)
            begin = now_ns();
        if (first) {
            send_frame(&w, n, payload);
            if (n > 0)
                release(&r, 1);
            *wrong += take_frame(&r, n, payload);
        } else {
            *wrong += take_frame(&r, n, payload);
            send_frame(&w, n, payload);
            release(&r, 1);
        }
    }
    return now_ns() - begin;
}

int main(int argc, char **argv) {
    if (argc != 5)
        return 2;
    int raw = strcmp(argv[1], "raw") == 0, payload = strcmp(argv[1], "payload") == 0;
    int whole = payload || strcmp(argv[1], "protocol") == 0;
    int64_t rounds = argument(argv, 2), wrong = 0;
    lane *lanes = shared(2 * sizeof(lane));
    ring rings[2];
    for (int i = 0; whole && i < 2; i++)
        rings[i] = new_ring(FRAMES, FRAMES * 2 * SIZE);
    make_payloads(SIZE);
    pid_t other = fork_on(argument(argv, 3), argument(argv, 4));
    int64_t elapsed_ns = whole ? whole_trips(other != 0, rings[0], rings[1], rounds, payload, &wrong)
                               : short_trips(other != 0, lanes, lanes + 1, rounds, raw, &wrong);
    if (other == 0)
        _exit(wrong != 0);
    int status = 0;
    waitpid(other, &status, 0);
    printf("%ld %.9f %ld\n", rounds, elapsed_ns / 1e9, wrong + (status != 0));
    return 0;
}
