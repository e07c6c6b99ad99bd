"""Linear layers, embedding, loss and norms split over the tp axis, and the record of what is true of each parameter."""
