function begin() {
  document.documentElement.classList.add("script");
  runs.forEach((run, i) => {
    const label = make("label", {}, find("run-choice"));
    const input = make("input", { type: "radio", name: "run", value: i }, label);
    input.checked = i === state.run;
    label.append(` ${run.name}`);
  });
  for (const input of document.querySelectorAll("input[type=radio]")) {
    input.addEventListener("change", () => {
      state[input.name] = input.name === "run" ? Number(input.value) : input.value;
      goToPeak();
    });
  }
  memory.place.addEventListener("pointermove", pointerMoved);
  memory.place.addEventListener("keydown", keyPressed);
  new ResizeObserver(() => {
    drawMemory();
    drawSettings();
  }).observe(document.querySelector("main"));
  goToPeak();
  drawSettings();
}

function goToPeak() {
  state.column = runs[state.run].peak;
  state.entry = largest(stack(runs[state.run], state.mode, state.column));
  drawMemory();
}

begin();
