"""Pure numeric functions on tensors: an obvious reference form and fast ones. Nothing here knows requests or plans."""
