"""``tunery report``: results as tables, pictures and one HTML page that opens offline."""
