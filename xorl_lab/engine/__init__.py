"""Models, batches and the one thread that trains and samples them."""
