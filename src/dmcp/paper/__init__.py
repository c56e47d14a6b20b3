"""The paper's experiments as settings that are compared, and what they found."""
