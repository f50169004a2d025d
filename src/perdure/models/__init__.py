"""Model families and the loading of their weights. Modules import modules; see `weights.load_model`."""
