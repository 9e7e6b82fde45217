"""RL-VLM-F's camera in each MetaWorld task, and a renderer that is fast without a GPU."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_vlm.types import UserInputError

# The original's pictures are taken at this size and cut to the window below.
_FULL = 480
_WHOLE = (0, _FULL, 0, _FULL)
# Rows and columns of the picture as MuJoCo gives it. The original cuts [100:400]² after turning it upside down.
_CUT = (80, 380, 100, 400)


@dataclass(frozen=True, slots=True)
class View:
    """A camera: either one of the model's by `name`, or one at `position` with `xyaxes` or `euler` (radians, xyz).

    `window` is what is kept of the picture: first and last row, first and last column, of 480. `turned`: the picture is
    upside down.
    """

    name: str = ""
    position: tuple[float, float, float] = (0.0, 0.0, 0.0)
    xyaxes: tuple[float, ...] | None = None
    euler: tuple[float, float, float] | None = None
    fovy: float = 45.0
    window: tuple[int, int, int, int] = _WHOLE
    turned: bool = True


ORIGINAL_VIEWS = {
    "drawer-open": View(position=(-0.6, 0.2, 0.35), xyaxes=(-1, 1, 0, -0.2, -0.2, -1), window=_CUT),
    "sweep-into": View(position=(0, 1.1, 0.75), euler=(-0.5, 0, 0), window=_CUT, turned=False),
    "soccer": View(position=(0.2, 0.6, 0.5), euler=(3.5, 2.7, 1)),
    "door-open": View(position=(0.7, 0.35, 0.6), euler=(3.9, 2.3, 0.6), fovy=60),
}
_DEFAULT_VIEW = View(name="corner2")  # the fork's choice for its later tasks
_TURNED_CAMERAS = ("corner", "corner2", "corner3", "corner4")


def choose_view(task: str, camera: str | None) -> View:
    """The task's original view, or one of the model's own cameras by name."""
    if camera is None or camera == "original":
        return ORIGINAL_VIEWS.get(task, _DEFAULT_VIEW)
    return View(name=camera, turned=camera in _TURNED_CAMERAS)


class SceneRenderer:
    """Pictures of one MuJoCo model from one view, without shadows, reflections and multisampling: where MuJoCo draws in
    software these cost ten times more than the rest. A window is drawn by a camera that sees only the window."""

    def __init__(self, model: Any, view: View, size: int, hide_arm: bool, show_goal: bool = False) -> None:
        mujoco = import_mujoco()
        self._view, self._size = view, size
        self._camera = _place_camera(mujoco, model, view)
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        model.vis.quality.offsamples = 0
        goal = [number for number in range(model.nsite) if show_goal and model.site(number).name == "goal"]
        model.site_rgba[[number for number in range(model.nsite) if number not in goal], 3] = 0.0
        if hide_arm:
            arm = model.body_rootid[model.body("right_hand").id]
            model.geom_rgba[np.isin(model.geom_bodyid, np.flatnonzero(model.body_rootid == arm)), 3] = 0.0
        with contextlib.suppress(ImportError):  # torch loads it later, and its LLVM after Mesa's crashes
            import triton  # noqa: F401
        try:
            self._renderer = mujoco.Renderer(model, size, size)
        except Exception as error:  # every GL binding has its own
            raise UserInputError(
                f"MuJoCo cannot draw here ({type(error).__name__}: {error}): install libegl1 and libgl1-mesa-dri and "
                "set MUJOCO_GL=egl, or libosmesa6 and MUJOCO_GL=osmesa."
            ) from error
        # At exit the drawing library may be gone before the renderer.
        self._finalizer = weakref.finalize(self, self._renderer.close)
        self._mujoco, self._model, self._drawn = mujoco, model, mujoco.MjData(model)
        self._state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        for costly in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._renderer.scene.flags[int(costly)] = 0

    def draw(self, data: Any) -> np.ndarray:
        """uint8 [size, size, 3]."""
        # The positions of bodies and of the edited camera must be recomputed, because a reset moves bodies without
        # doing so. This is done in a copy: in `data` it would change where the solver of the next step begins, and with
        # it the episode.
        mujoco, everything = self._mujoco, self._mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_getState(self._model, data, self._state, everything)
        mujoco.mj_setState(self._model, self._drawn, self._state, everything)
        mujoco.mj_fwdPosition(self._model, self._drawn)
        self._renderer.update_scene(self._drawn, self._camera)
        first_row, last_row, first_column, last_column = (edge / _FULL for edge in self._view.window)
        for camera in self._renderer.scene.camera:
            top, height = camera.frustum_top, camera.frustum_top - camera.frustum_bottom
            camera.frustum_top = top - height * first_row
            camera.frustum_bottom = top - height * last_row
            # The whole picture is square, so it is as wide as it is high.
            camera.frustum_center = height * ((first_column + last_column) / 2 - 0.5)
            camera.frustum_width = height * (last_column - first_column) / 2
        picture = self._renderer.render()
        return np.ascontiguousarray(picture[::-1, ::-1]) if self._view.turned else picture

    def close(self) -> None:
        """Free the drawing context. A second call does nothing."""
        self._finalizer()


def import_mujoco() -> Any:
    """`import mujoco`, with a renderer that needs no display where there is none."""
    if "mujoco" not in sys.modules and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl" if ctypes.util.find_library("EGL") else "osmesa")
    try:
        import mujoco
    except ImportError as error:
        raise UserInputError(f"MetaWorld needs MuJoCo ({error}): run `pip install 'rl-vlm[metaworld]'`.") from error
    return mujoco


def _place_camera(mujoco: Any, model: Any, view: View) -> int:
    """The number of the camera; a view of the original's replaces the model's corner2."""
    name = view.name or "corner2"
    number = int(mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, name))
    if number < 0:
        known = ", ".join(model.camera(k).name for k in range(model.ncam))
        raise UserInputError(f"MetaWorld has no camera {name!r}. Known: original, {known}.")
    if view.name:
        return number
    quaternion = np.zeros(4)
    if view.euler is not None:
        mujoco.mju_euler2Quat(quaternion, np.array(view.euler, float), "xyz")
    else:
        assert view.xyaxes is not None
        mujoco.mju_mat2Quat(quaternion, _rotation(np.array(view.xyaxes, float)).ravel())
    model.cam_pos[number], model.cam_quat[number], model.cam_fovy[number] = view.position, quaternion, view.fovy
    return number


def _rotation(xyaxes: np.ndarray) -> np.ndarray:
    """float64 [3, 3] with the camera's axes as columns, y made orthogonal to x as MuJoCo's compiler does."""
    x = xyaxes[:3] / np.linalg.norm(xyaxes[:3])
    y = xyaxes[3:] - x * (x @ xyaxes[3:])
    y /= np.linalg.norm(y)
    return np.stack([x, y, np.cross(x, y)], axis=1)
