"""Other libraries' objects in a step: one file for each library, which alone imports it."""
