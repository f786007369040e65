"""Numbers over time: slow ranks and links, and what loss and gradients tell."""
