/* Publishing one frame after the other, by the whole protocol, with nobody there to read.
 *
 *     publish FRAMES ARENA_BYTES COUNT SIZE CPU      prints: frames seconds wrong
 *
 * The payloads are not written. At the end the frames that are still intact are checked.
 */
#include "protocol.h"

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    int64_t frames = argument(argv, 1), count = argument(argv, 3), size = argument(argv, 4), wrong = 0;
    pin(argument(argv, 5));
    writer w = {.ring = new_ring(frames, argument(argv, 2)), .alone = 1};
    int64_t begin = now_ns();
    for (int64_t n = 0; n < count; n++) {
        wrong += !reserve(&w, 1, stride_of(size));
        publish(&w, 1, put(&w, 0, w.position, size, NULL), size);
    }
    int64_t end = now_ns();
    for (int64_t n = count > frames ? count - frames + 1 : 0; n < count; n++)
        wrong += is_wrong_at(&w.ring, n, size, -1);
    wrong += w.ring.control->published.value != count;
    printf("%ld %.9f %ld\n", count, (end - begin) / 1e9, wrong);
    return 0;
}
