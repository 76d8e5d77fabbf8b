"""LION: bidirectional encoders at linear cost, as a Hugging Face Transformers model family."""

__version__ = "0.1.0"
