import time

from bench import busy

STAT = """\
cpu  300 10 200 5000 50 7 30 4 0 0
cpu0 100 10 100 3000 30 7 20 4 0 0
cpu3 200 0 100 2000 20 0 10 0 0 0
intr 12345 0 0
ctxt 99
softirq 1 2 3
"""


def test_interrupts_are_nobodys() -> None:
    assert dict(busy.parse(STAT)) == {0: (2.10, 0.27, 0.04), 3: (3.00, 0.10, 0.0)}


def test_a_cpu_that_works_is_busy() -> None:
    before, end = busy.read(), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    spent = [after.since(before[cpu]) for cpu, after in busy.read().items()]
    assert sum(cpu.own for cpu in spent) >= 0.1
