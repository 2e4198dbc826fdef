"""Training on many devices and in many processes: who there is, and where arrays live."""
