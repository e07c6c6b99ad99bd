"""Linear layers, embedding, loss and norms whose weights are split over the tp axis, and what is true of each parameter."""
