// Opening every box of the graph: laid out in slices, inner boxes first, so that the page stays alive and it can be
// stopped. Until all is laid out nothing on the canvas changes; whoever changes the graph meanwhile stops it.

const SLICE = 30; // ms of laying out at a time

function makeOpening(view) {
  const { tree, told } = view;
  let run = null;
  const innerFirst = () => [...tree.items.values()].filter((item) => !item.leaf && item !== tree.root).sort((a, b) => b.depth - a.depth);

  view.opening = () => {}; // set by main.js: told whether it is running
  view.stop = () => {
    if (!run) return;
    for (const group of run.closed) setOpen(group, false);
    run = null;
    view.opening(false);
    told("stopped: as it was before");
  };
  view.openAll = async () => {
    view.stop();
    const groups = innerFirst();
    const mine = (run = { closed: groups.filter((g) => !g.open) });
    view.opening(true);
    for (const group of groups) setOpen(group, true);
    for (let i = 0, since = performance.now(); i < groups.length; i++) {
      arrange(groups[i]);
      if (performance.now() - since < SLICE) continue;
      told(`laying out: ${count(i)} of ${plural(groups.length, "box", "boxes")}`);
      await new Promise((go) => setTimeout(go));
      if (run !== mine) return;
      since = performance.now();
    }
    run = null;
    view.opening(false);
    view.draw();
    view.fit();
    told(`everything open: ${plural(view.number, "box", "boxes")}`);
  };
  view.closeAll = () => {
    view.stop();
    for (const group of innerFirst()) setOpen(group, false);
    openAtStart(tree);
    view.draw();
    view.fit();
    told("closed again");
  };
}
