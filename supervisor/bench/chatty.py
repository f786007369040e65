"""A rank that only prints: one line a step, as many a second as its argument says. It needs only Python."""

import os
import sys
import time

rank, per_s = int(os.environ["RANK"]), float(sys.argv[1])
for step in range(1, 1_000_000):
    print(f"[rank{rank}] step {step}/1000000 | loss {2 + 1 / step:.4f} | lr 3.0e-04 | tokens/s 412903 | mfu 0.43")
    sys.stdout.flush()
    time.sleep(1 / per_s)
