"""Image quality: broken images, paired metrics, CLIP score, and distances between sets of images."""
