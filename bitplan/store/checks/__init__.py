"""Are the numbers in a file sound, and how far are they from their master?"""
