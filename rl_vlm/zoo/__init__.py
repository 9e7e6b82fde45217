"""Built-in environments and tiny models.

A folder holds all of one environment: data or drawing, answers, reward, lesson.
"""
