"""Image quality: tripwires, paired metrics, CLIP score, and distances between sets of images."""
