"""CPU lists and masks by the ten thousand: the valid read back exactly, the broken refused, all in no time.

    PYTHONPATH=tests python -m cpu_lists --seed 7

Half of them are written by us, for sets with holes of up to 4,096 CPUs; half are broken: other signs,
reversed, negative, huge, spaces, digits that are none of the kernel's, very long. Printed is the CPU time of
the slowest, the best of three tries: what else the machine does is not in it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from engine.affinity.topology import format_cpu_list, format_hex_mask, parse_hex_mask, parse_kernel_list

COUNT = 10_000
_SIGNS = "0123456789,-  abcfx:\n٣"


def broken(chance: random.Random) -> str:
    """Hardly ever a list or a mask."""
    kinds = (
        lambda: "".join(chance.choice(_SIGNS) for _ in range(chance.randrange(40))),
        lambda: f"{chance.randrange(99)}-{chance.randrange(9)}",
        lambda: str(10 ** chance.randrange(3000)),
        lambda: f"-{chance.randrange(99)}",
        lambda: " 1",
        lambda: ",".join("1" * chance.randrange(12) for _ in range(200)),
        lambda: "f" * chance.randrange(4000),
        lambda: "0-4095," * 50,
    )
    return chance.choice(kinds)()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cpu_lists", description="CPU lists and masks, valid and broken.")
    parser.add_argument("--seed", type=int, default=5, help="which are drawn (5)")
    chance = random.Random(parser.parse_args(arguments).seed)
    slowest_s, text_of_it, read, refused = 0.0, "", 0, 0
    for number in range(COUNT):
        cpus = {chance.randrange(chance.choice((2, 64, 256, 4096))) for _ in range(chance.randrange(60))}
        for write, parse in ((format_cpu_list, parse_kernel_list), (format_hex_mask, parse_hex_mask)):
            valid = number % 2 == 0
            text, times_s, found = write(cpus) if valid else broken(chance), [], None
            for _ in range(3):
                begin = time.process_time()
                try:
                    found = parse(text)
                except ValueError:
                    found = None
                times_s.append(time.process_time() - begin)
            assert not valid or found == tuple(sorted(cpus)), f"{text!r} was read as {found}"
            read, refused = read + (found is not None), refused + (found is None)
            if min(times_s) > slowest_s:
                slowest_s, text_of_it = min(times_s), text
    print(f"{COUNT:,} lists and as many masks: {read:,} read, {refused:,} refused")
    print(f"the slowest took {slowest_s * 1e3:.3f} ms of CPU time: {text_of_it[:60]!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
