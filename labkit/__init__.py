"""From where decode time goes to a measured go or no-go on speculative decoding, and to a served EAGLE-3 head."""

__version__ = "0.1.0"
