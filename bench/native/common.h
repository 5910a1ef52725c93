/* What the reference programs share: pinning, clocks, fences as the ring makes them. */
#ifndef RXRING_BENCH_COMMON_H
#define RXRING_BENCH_COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LINE 128 /* as rings.layout.LINE: two cache lines, since the prefetcher fetches them in pairs */

typedef struct {
    _Alignas(LINE) _Atomic int64_t value;
} word; /* alone on its lines */

typedef struct {
    int64_t number, time_ns, place, remarks;
} descriptor; /* 32 bytes, as rings.layout.DESCRIPTOR */

/* What `rings.atomics.pause` is. */
static inline void spin_hint(void) {
#if defined(__x86_64__)
    __asm__ volatile("pause" ::: "memory");
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* The descriptor of frame n, and whether one is it: as bench/ring.py has them. */
static inline descriptor describe(int64_t n, int64_t frames) {
    return (descriptor){n, n ^ 0x5555, ((n * 8) & (frames * 16 - 1)) | 128LL << 32, n & 0xffff};
}

static inline int is_wrong(const descriptor *d, int64_t n, int64_t frames) {
    descriptor e = describe(n, frames);
    return ((d->number ^ e.number) | (d->time_ns ^ e.time_ns) | (d->place ^ e.place) |
            (d->remarks ^ e.remarks)) != 0;
}

static inline void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) {
        perror("sched_setaffinity");
        exit(2);
    }
}

/* fork(), each end on its CPU. The child starts on its own: where the parent spins with real-time
 * priority it would never get away from the parent's. */
static inline pid_t fork_on(int parent_cpu, int child_cpu) {
    pin(child_cpu);
    pid_t child = fork();
    if (child != 0)
        pin(parent_cpu);
    return child;
}

static inline int64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

/* Zeroed memory that a forked child shares. */
static inline void *shared(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return memory;
}

static inline int64_t argument(char **argv, int i) { return strtoll(argv[i], NULL, 10); }

#endif
