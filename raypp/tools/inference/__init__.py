"""Uses a trained model: finds it, and generates text with it."""
