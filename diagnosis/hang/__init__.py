"""When is silence a hang?"""
