/* What the one stage of bench/statistics.py costs in C: count, bytes, exact sums, least, most and a histogram of
 * kernel time − stamp, over the packets of GRO frames as a ring holds them.
 *
 *     statistics DESCRIPTORS ARENA PASSES CPU      prints: ns packets bytes total check least most
 *
 * DESCRIPTORS and ARENA are files. ns: of the fastest of PASSES; the rest is of all of them. check: the sum of
 * index × samples over all buckets.
 */
#include "common.h"
#include <string.h>

#define ROW 64
#define PARTS_LOG2 6
#define BUCKETS ((63 << PARTS_LOG2) + 2)
#define MAGIC 0x31525852 /* "RXR1" */

typedef struct {
    int64_t number, time_ns;
    uint32_t offset, length, socket_ns;
    uint16_t segment, flags;
} frame;

static struct {
    int64_t count, bytes, least, most;
    unsigned __int128 total, squares;
    int64_t buckets[BUCKETS];
} stage;

/* As engine.handlers.histogram.bucket. */
static inline int64_t bucket(int64_t x) {
    double value = x;
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits >> (52 - PARTS_LOG2)) - ((1023 << PARTS_LOG2) - 1);
    return bits > 0 ? bits : 0;
}

static void add_row(const int64_t *row, int64_t count) {
    uint64_t total = 0, low = 0, high = 0;
    int64_t least = row[0], most = row[0];
    for (int64_t i = 0; i < count; i++) {
        uint64_t word = (uint32_t)row[i], square = word * word;
        total += word, low += (uint32_t)square, high += square >> 32;
        least = row[i] < least ? row[i] : least, most = row[i] > most ? row[i] : most;
    }
    for (int64_t i = 0; i < count; i++)
        stage.buckets[bucket(row[i])]++;
    stage.least = stage.count == 0 || least < stage.least ? least : stage.least;
    stage.most = most > stage.most ? most : stage.most;
    stage.count += count, stage.total += total;
    stage.squares += ((unsigned __int128)high << 32) + low;
}

static void take(const frame *frames, int64_t count, const char *arena) {
    int64_t row[ROW], waiting = 0;
    for (int64_t n = 0; n < count; n++) {
        const char *packet = arena + (int64_t)frames[n].offset * 16;
        for (int64_t left = frames[n].length; left > 0; left -= frames[n].segment, packet += frames[n].segment) {
            uint32_t magic;
            int64_t sent_ns;
            memcpy(&magic, packet, sizeof magic);
            memcpy(&sent_ns, packet + 16, sizeof sent_ns);
            if (magic != MAGIC)
                exit(3);
            stage.bytes += left < frames[n].segment ? left : frames[n].segment;
            row[waiting++] = frames[n].time_ns - sent_ns;
            if (waiting == ROW)
                add_row(row, ROW), waiting = 0;
        }
    }
    if (waiting > 0)
        add_row(row, waiting);
}

static char *whole(const char *path, int64_t *size) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        perror(path);
        exit(2);
    }
    *size = ftell(file);
    rewind(file);
    char *memory = aligned_alloc(64, (*size + 63) / 64 * 64);
    if (memory == NULL || fread(memory, 1, *size, file) != (size_t)*size)
        exit(2);
    fclose(file);
    return memory;
}

int main(int argc, char **argv) {
    if (argc != 5)
        return 2;
    int64_t size, arena_size, passes = argument(argv, 3), best = INT64_MAX, check = 0;
    pin(argument(argv, 4));
    frame *frames = (frame *)whole(argv[1], &size);
    char *arena = whole(argv[2], &arena_size);
    for (int64_t pass = 0; pass < passes; pass++) {
        int64_t begin = now_ns();
        take(frames, size / sizeof *frames, arena);
        int64_t elapsed = now_ns() - begin;
        best = elapsed < best ? elapsed : best;
    }
    for (int64_t i = 0; i < BUCKETS; i++)
        check += i * stage.buckets[i];
    printf("%ld %ld %ld %ld %ld %ld %ld\n", best, stage.count, stage.bytes, (int64_t)stage.total, check, stage.least,
           stage.most);
    return 0;
}
