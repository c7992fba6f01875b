"""Where bytes live: how the engine's blocks are laid out, and the memory of each tier on one rank."""
