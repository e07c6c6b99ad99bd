"""What a loss is. An objective returns a sum and a weight, never a mean: the trainer divides by the weight of the whole step,
so that a padded, packed, masked or accumulated step has one meaning in every layout."""
