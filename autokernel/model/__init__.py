"""A model, its graphs, the sites in them and the time that they take."""
