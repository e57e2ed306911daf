"""``mua plan``: what a configuration needs of its machines, by calculation, before anything is started."""
