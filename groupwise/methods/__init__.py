"""The parts of a method: slots, recipes as records of slots, and which of them make sense."""
