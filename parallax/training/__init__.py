"""Where all parts meet: the train step, the loop around it, what it measures and what it leaves behind."""
