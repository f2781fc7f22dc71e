"""Takes in images, times and scores that other programs made, and gives out sdopt's own in the same form."""
