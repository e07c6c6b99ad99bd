"""The decoder: its configuration and presets, its blocks, and how its layers are laid out over pipeline stages."""
