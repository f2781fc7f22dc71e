"""Draws with diffusers alone, as a user's script does: a baseline, the same once more, and a change of one's own.

python plain_diffusers.py MODEL TARGET
"""

import csv
import sys
import time
from pathlib import Path

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline

MODEL, TARGET = sys.argv[1:]
COUNT = 20


def draw(name: str, changed: bool) -> None:
    """Writes a folder of images with what they were made from, and how long that took."""
    pipe = StableDiffusionPipeline.from_pretrained(MODEL, safety_checker=None, requires_safety_checker=False)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    if changed:
        pipe.unet.to(memory_format=torch.channels_last)
    folder = Path(TARGET) / name
    folder.mkdir(parents=True)
    prompts, times = [("file", "prompt", "seed")], [("file", "seconds", "replicate")]
    colours = ("red", "blue", "green", "yellow")
    things = ("apple", "cat", "car", "house", "star")
    for number in range(COUNT):
        prompt = f"a {colours[number % 4]} {things[number // 4]}"
        noise = torch.Generator().manual_seed(number)
        start = time.perf_counter()
        [image] = pipe(prompt, num_inference_steps=2, generator=noise).images
        times.append((f"{number}.png", str(time.perf_counter() - start), "0"))
        image.save(folder / f"{number}.png")
        prompts.append((f"{number}.png", prompt, str(number)))
    for table, rows in (("prompts", prompts), ("times", times)):
        with (folder / f"{table}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows(rows)


torch.set_num_threads(1)
for kind in ("base", "again", "changed"):
    draw(kind, kind == "changed")
