"""What a rank sees of averaging: its model as one flat layout, and the plane that seals and adopts it."""
