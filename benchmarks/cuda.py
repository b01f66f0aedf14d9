"""All benchmarks of a CUDA device, in pieces that are bounded in time and can be resumed.

Usage: python benchmarks/cuda.py [--seconds 560] [--resume cuda.json] [--only NAME ...]
       python benchmarks/cuda.py --store cuda.json

Each piece is one script with one network, in a process of its own, so that an error or a hang of
one costs none of the others. After each piece, its results, the end of its output and its time are
added to ``cuda.json`` in the folder of results, ``RITZ_BENCHMARK_RESULTS`` if that is set. A piece
that has results there, or in the file of ``--resume``, is not run again; one that failed or ran out
of time is. No piece starts that has less than a third of its time left. ``--store`` writes the
results of such a file as ``results/<script>.json``. Only torch and ritz are needed: what needs
another library is left out, with one line in the output.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import RESULTS

FOLDER = Path(__file__).parent
FILE = "cuda.json"
TAIL = 4000  # characters of the output of a piece that are kept

MODELS = ("GPT, 6 layers", "ViT of torch", "ResNet-20", "ConvNeXt", "LSTM", "GRU",
          "GPT-2, Hugging Face", "Llama, Hugging Face", "BERT, Hugging Face")  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """One script with its arguments, those of a small form, and the seconds that it may take."""

    script: str
    arguments: tuple[str, ...]
    small: tuple[str, ...]
    seconds: int


def pieces(device):
    """Return all pieces by name, those that matter most first."""

    def piece(script, full, small, seconds):
        return Piece(script, *(tuple(t.format(device=device).split()) for t in (full, small)),
                     seconds)  # fmt: skip

    def model(name, *more):
        return ("--models", name, "--device", device, *more)

    full, small = ("--scale", "8", "--rounds", "5", "--compile"), ("--rounds", "1")
    found = {
        "products-vgg16": piece("products", "--networks vgg16 --batch 512 --compile --name "
                                "products_{device}", "--networks mlp --rounds 1 --name "
                                "products_{device}", 240),
        "second-order-vgg16": piece("second_order", "--network vgg16 --device {device}",
                                    "--network mlp --rounds 1 --device {device}", 150),
        "kfac-tf32": piece("kfac_steps", "--device {device} --rounds 3 --precisions tf32",
                           "--device {device} --rounds 1 --networks mlp", 180),
        "noise-mlp": piece("noise", "--device {device} --networks mlp wide --rounds 7",
                           "--device {device} --networks mlp --batch 256 --rounds 2", 60),
        "noise-vgg16": piece("noise", "--device {device} --networks vgg16 --rounds 5",
                             "--device {device} --networks mlp --batch 256 --rounds 2", 150),
        "monitors-vgg16": piece("monitors", "--device {device} --network vgg16 --samples 50000 "
                                "--rounds 2", "--device {device} --samples 512 --watched 64 "
                                "--every 1 --rounds 1", 240),
    }  # fmt: skip
    for name in MODELS:
        found[f"models-{name}"] = Piece("models", model(name, *full), model(name, *small), 120)
    return found | {
        "products-small": piece("products", "--networks mlp cnn --compile --name products_{device}",
                                "--networks mlp --rounds 1 --name products_{device}", 150),
        "kfac-float32": piece("kfac_steps", "--device {device} --rounds 3 --precisions float32",
                              "--device {device} --rounds 1 --networks mlp", 240),
        "kfac-eigh": piece("kfac_steps", "--device {device} --part eigh --rounds 3",
                           "--device {device} --part eigh --rounds 1 --order 64", 120),
        "kfac-factors": piece("kfac_steps", "--device {device} --part factors --rounds 3",
                              "--device {device} --part factors --rounds 1 --batch 2", 90),
        "monitors-quantities": piece("monitors", "--device {device} --network vgg16 --samples 4096 "
                                     "--part quantities --rounds 1", "--device {device} --samples "
                                     "512 --watched 64 --every 1 --rounds 1", 300),
        "optimizers": piece("optimizers", "--device {device} --size 100M --rounds 3 --steps 20",
                            "--device {device} --steps 2 --rounds 1", 120),
        "bases": piece("gpu", "", "", 120),
    }  # fmt: skip


def run(piece, arguments, limit):
    """Run a piece for at most ``limit`` seconds; return its status, time, output and results."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(FOLDER / f"{piece.script}.py"), *arguments]
        log = Path(out) / "output"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"RITZ_BENCHMARK_RESULTS": out, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, 9)
                    process.wait()
        results = {}
        for path in sorted(Path(out).glob("*.json")):
            try:
                results[path.name] = json.loads(path.read_text())
            except ValueError:  # killed while writing
                continue
        output = log.read_text(errors="replace")[-TAIL:]
    status = "out of time" if code is None else "failed" if code else "done"
    if status == "done" and not results:
        status = "left out"
    return {
        "status": status,
        "seconds": round(time.monotonic() - begin, 1),
        "output": output,
        "results": results,
    }


def save(path, found):
    """Write a file as a whole, so that an interruption leaves the one before."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(path)


def store(path):
    """Write the results of pieces to the folder of results, those of one script together."""
    merged = {}
    for record in json.loads(path.read_text()).values():
        for name, content in record["results"].items():
            rows = merged.get(name, {}).get("results", [])
            merged[name] = content | {"results": rows + content["results"]}
    for name, content in merged.items():
        (RESULTS / name).write_text(json.dumps(content, indent=1) + "\n")
        print(RESULTS / name)


def main():
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small forms, to try it on a CPU")
    parser.add_argument("--seconds", type=float, default=560, help="for all pieces of this call")
    parser.add_argument("--only", nargs="+", help="beginnings of the names of pieces")
    parser.add_argument("--resume", type=Path, help="file of an earlier call")
    parser.add_argument("--store", type=Path, help="write the results of a file; run nothing")
    args = parser.parse_args()
    if args.store:
        store(args.store)
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing measured")
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    path, end = RESULTS / FILE, time.monotonic() + args.seconds
    earlier = args.resume or path
    found = json.loads(earlier.read_text()) if earlier.exists() else {}
    for name, piece in pieces(args.device).items():
        if args.only and not name.startswith(tuple(args.only)):
            continue
        left = end - time.monotonic()
        if found.get(name, {}).get("status") in ("done", "left out"):
            text = f"{found[name]['status']} before"
        elif left < piece.seconds / 3:
            text = f"not begun: it may take {piece.seconds} s, and {left:.0f} s are left"
        else:
            arguments = piece.small if args.small else piece.arguments
            found[name] = run(piece, arguments, min(piece.seconds, left))
            save(path, found)
            text = f"{found[name]['status']} in {found[name]['seconds']} s"
            if found[name]["status"] != "done":
                text += ": " + (found[name]["output"].strip().splitlines() or [""])[-1]
        print(f"{name:28} {text}", flush=True)
    save(path, found)


if __name__ == "__main__":
    main()
