/* The ring's whole protocol in plain C, for one writer and one reader: what rings/writer.py and
 * rings/reader.py do for a batch, store by store and fence by fence. The arena is large enough for frames
 * to run out first, so nothing here looks for the payload that a batch would overwrite.
 */
#ifndef RXRING_BENCH_PROTOCOL_H
#define RXRING_BENCH_PROTOCOL_H

#include "common.h"
#include <string.h>

#define KINDS 61 /* payloads in turn: no power of two, so that a frame of the last lap is a wrong one */
#define MAX_SIZE 1472

typedef struct {
    word published, floor, waiting, wake;
    struct {
        _Alignas(LINE) _Atomic int64_t packets, bytes;
    } counters;
    word cursor;
    struct {
        _Alignas(LINE) _Atomic int64_t fields[2][5];
    } accounts;
} control;

typedef struct {
    control *control;
    descriptor *frames;
    char *arena;
    int64_t frame_count, arena_bytes;
} ring;

typedef struct {
    ring ring;
    int64_t head, floor, gate, position, bytes;
    int alone; /* nobody gates */
} writer;

typedef struct {
    ring ring;
    int64_t cursor, account;
} reader;

static char payloads[KINDS][MAX_SIZE];
static int64_t sums[KINDS];

#define store_relaxed(place, value) atomic_store_explicit(place, value, memory_order_relaxed)

static inline ring new_ring(int64_t frames, int64_t arena_bytes) {
    int64_t table = (frames * (int64_t)sizeof(descriptor) + 4095) & -4096;
    char *memory = shared(8192 + table + arena_bytes);
    return (ring){(control *)memory, (descriptor *)(memory + 8192), memory + 8192 + table, frames, arena_bytes};
}

/* The sum of `size` bytes, four at a time. */
static inline int64_t sum(const char *bytes, int64_t size) {
    const uint32_t *words = (const uint32_t *)bytes;
    int64_t total = 0;
    for (int64_t i = 0; i < size / 4; i++)
        total += words[i];
    return total;
}

static inline void make_payloads(int64_t size) {
    uint32_t state = 1;
    for (int kind = 0; kind < KINDS; kind++) {
        for (int64_t i = 0; i < size; i++)
            payloads[kind][i] = (state = state * 1664525 + 1013904223) >> 24;
        sums[kind] = sum(payloads[kind], size);
    }
}

static inline int64_t stride_of(int64_t size) { return (size + 15) & -16; }

static inline int reserve(writer *w, int64_t count, int64_t size) {
    int64_t mask = w->ring.arena_bytes - 1, start = w->position;
    if ((start & mask) + size > w->ring.arena_bytes)
        start = (start | mask) + 1;
    int64_t floor = w->head + count + 1 - w->ring.frame_count;
    if (floor > w->gate) {
        atomic_thread_fence(memory_order_seq_cst);
        w->gate = w->alone ? w->head : atomic_load_explicit(&w->ring.control->cursor.value, memory_order_acquire);
        if (floor > w->gate)
            return 0;
    }
    w->position = start;
    if (floor > w->floor) {
        w->floor = floor;
        store_relaxed(&w->ring.control->floor.value, floor);
        atomic_thread_fence(memory_order_release);
    }
    return 1;
}

/* Frame `head + index`, its payload (if it has one of its own) copied in; the position behind it. */
static inline int64_t put(writer *w, int64_t index, int64_t position, int64_t size, const char *payload) {
    int64_t n = w->head + index, offset = position & (w->ring.arena_bytes - 1);
    if (payload)
        memmove(w->ring.arena + offset, payload, size);
    w->ring.frames[n & (w->ring.frame_count - 1)] =
        (descriptor){n, n ^ 0x5555, offset / 16 | size << 32, n & 0xffff};
    return position + stride_of(size);
}

static inline void publish(writer *w, int64_t count, int64_t position, int64_t size) {
    control *c = w->ring.control;
    w->head += count;
    w->ring.frames[w->head & (w->ring.frame_count - 1)].number = w->head;
    w->position = position;
    w->bytes += size;
    store_relaxed(&c->counters.packets, w->head);
    store_relaxed(&c->counters.bytes, w->bytes);
    atomic_store_explicit(&c->published.value, w->head, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&c->waiting.value, memory_order_relaxed)) {
        store_relaxed(&c->waiting.value, 0);
        atomic_fetch_add(&c->wake.value, 1);
    }
}

/* How many frames are there: at most half the ring, and in one piece. */
static inline int64_t poll(reader *r) {
    int64_t frames = r->ring.frame_count;
    int64_t count = atomic_load_explicit(&r->ring.control->published.value, memory_order_acquire) - r->cursor;
    int64_t to_the_end = frames - (r->cursor & (frames - 1));
    count = count < frames / 2 ? count : frames / 2;
    return count < to_the_end ? count : to_the_end;
}

/* Is frame n not as `put` makes it? `expected`: the sum of its payload; −1: nobody wrote one. */
static inline int is_wrong_at(const ring *r, int64_t n, int64_t size, int64_t expected) {
    const descriptor *d = &r->frames[n & (r->frame_count - 1)];
    int64_t offset = (d->place & 0xffffffff) * 16;
    if ((d->number ^ n) | (d->time_ns ^ n ^ 0x5555) | (d->place >> 32 ^ size) | (d->remarks ^ (n & 0xffff)))
        return 1;
    if (offset + size > r->arena_bytes)
        return 1;
    return expected >= 0 && sum(r->arena + offset, size) != expected;
}

static inline void release(reader *r, int64_t count) {
    control *c = r->ring.control;
    r->cursor += count;
    atomic_thread_fence(memory_order_release);
    for (int i = 0; i < 5; i++) /* cursor, packets, delivered; skipped and passed are 0 */
        store_relaxed(&c->accounts.fields[r->account][i], i < 3 ? r->cursor : 0);
    r->account = 1 - r->account;
    atomic_store_explicit(&c->cursor.value, r->cursor, memory_order_release);
}

#endif
