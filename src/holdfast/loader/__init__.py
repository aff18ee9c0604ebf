"""The DataLoader. iterator.py is the main path: index in, batch out."""
