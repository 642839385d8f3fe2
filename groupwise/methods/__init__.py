"""What a method is made of: slots, recipes as records of slots, and which of them make sense."""
