"""The ResNet's blocks with fewer bytes read and written a step: the same params and function."""
