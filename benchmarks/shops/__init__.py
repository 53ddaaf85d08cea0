"""Generated shops: is the recipe for logs of one's own better than what three seconds of another library give?"""
