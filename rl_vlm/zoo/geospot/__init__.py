"""GeoSpot-v0: say where on earth a picture was taken."""
