"""An agent with a tool that returns a picture: the card in box 0 shows by its colour which box has the prize."""

import base64
import io
import json

from PIL import Image

COLOURS = ("red", "blue", "green", "yellow", "purple", "orange")
TASK = """The card in box 0 shows where a prize is: {rule}. Open a box such as <tool_call>
{{"name": "open_box", "arguments": {{"number": 0}}}}
</tool_call>"""
TOOLS = [{"type": "function", "function": {"name": "open_box", "parameters": {"properties": {"number": {}}}}}]


class Boxes:
    def __init__(self, boxes=2):
        self.colours = COLOURS[:boxes]

    async def run(self, client, task):
        rule = ", ".join(f"{colour} is {number}" for number, colour in enumerate(self.colours, 1))
        messages = [{"role": "user", "content": TASK.format(rule=rule)}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=task.model, messages=messages, tools=TOOLS)
            if not (said := answer.choices[0].message).tool_calls:
                break
            number = json.loads(said.tool_calls[0].function.arguments).get("number")
            if number != 0:  # it is locked until the card was seen
                return number if len(messages) > 1 else None
            messages += [said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": self.card(task)}]

    def reward(self, task, result):
        return float(result == 1 + task.index % len(self.colours))

    def card(self, task):
        image, file = Image.new("RGB", (64, 64), tuple(task.random().integers(100, 150, 3).tolist())), io.BytesIO()
        image.paste(self.colours[task.index % len(self.colours)], (8, 8, 56, 56))
        image.save(file, "PNG")
        png = base64.b64encode(file.getvalue()).decode()
        return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}}]
