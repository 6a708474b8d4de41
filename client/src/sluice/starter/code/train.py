"""Example training: fits a straight line to noisy points. Replace it with your own code."""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--result", type=Path, default=Path("result"))
options = parser.parse_args()

random.seed(1)
points = [(x / 50, 3 * x / 50 + 1 + random.gauss(0, 0.1)) for x in range(50)]
slope = offset = 0.0
for epoch in range(1, options.epochs + 1):
    for x, y in points:
        error = slope * x + offset - y
        slope, offset = slope - 0.1 * error * x, offset - 0.1 * error
    loss = sum((slope * x + offset - y) ** 2 for x, y in points) / len(points)
    print(f"epoch {epoch} loss {loss:.4f}", flush=True)  # noqa: T201
    time.sleep(0.6)  # so that the output can be followed

options.result.mkdir(parents=True, exist_ok=True)
(options.result / "model.json").write_text(json.dumps({"slope": slope, "offset": offset}))
