"""An agent that plays the quickstart's task.

Run `rl-vlm train quickstart env.id=examples/agent.py env.kwargs='{num_train: 4096, num_test: 512}'`. It asks the policy
as any program asks an OpenAI server, and returns the episode's reward (docs/agents.md).
"""

import base64

import rl_vlm
from rl_vlm.types import as_encoded


def in_openais_form(message):
    """A message of an environment as OpenAI's clients send it."""
    parts = []
    for part in message.parts:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            url = "data:image/png;base64," + base64.b64encode(as_encoded(part).png).decode()
            parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": message.role, "content": parts}


async def agent(client, task):
    env = rl_vlm.make("Shapes-v0", task="count")
    shown, _ = env.reset(seed=0, options={"index": task.index, "split": task.split})
    reward, messages = 0.0, []
    while shown.messages:
        messages += map(in_openais_form, shown.messages)
        answer = (await client.chat.completions.create(model=task.model, messages=messages)).choices[0]
        if answer.finish_reason == "length":  # an answer that was cut off is no answer
            break
        messages.append({"role": "assistant", "content": answer.message.content})
        shown, step_reward, *_ = env.step(answer.message.content)
        reward += step_reward
    return reward
