"""Damage to files, and limits on what reading a damaged file may cost."""

import random
import resource
import time
from contextlib import contextmanager

CASES = 10_000


def damaged(content, count, seed=0):
    """Yield copies of some bytes with bits flipped, parts cut out, inserted, repeated or zeroed."""
    source = random.Random(seed)
    for _ in range(count):
        data = bytearray(content)
        for _ in range(source.randint(1, 3)):
            place = source.randrange(len(data) or 1)
            length = source.randint(1, 12)
            kind = source.choice(["flip", "cut", "insert", "zero", "repeat", "number"])
            if kind == "flip" and data:
                data[place] ^= 1 << source.randrange(8)
            elif kind == "cut":
                del data[place : place + (length if source.random() < 0.7 else len(data))]
            elif kind == "insert":
                data[place:place] = source.randbytes(length)
            elif kind == "zero":
                data[place : place + length] = bytes(length)
            elif kind == "repeat":
                data[place:place] = data[place : place + length] * source.choice([1, 9, 99])
            else:  # a size that is much too large
                data[place : place + 8] = b"\xff" * source.randint(1, 8)
        yield bytes(data)


@contextmanager
def cheap(seconds=5.0, megabytes=600):
    """Fail if the block takes much processor time, or much more memory than was used before."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - begin < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes * 1024
