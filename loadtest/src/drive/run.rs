//! Sends the requests of a run, in a closed or an open loop.
//!
//! Invariant: in an open loop, latencies count from the moment when a request should have started.
//! A load test that is late itself so never makes the server look faster.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep_until};

use super::args::{ClientArgs, LoadSchedule, LoadSource, WorkloadArgs};
use super::conversation::ChatHistory;
use super::live::{LiveCounts, LiveView};
use super::outcome::ChatOutcome;
use super::record::{EndedRequest, RequestIdentity, RunRecord};
use super::target::TargetServer;
use crate::workload::{RecordedTrace, Session, Trace, Workload};

/// The requests of a run, from a workload or a trace file.
pub(super) struct RunRequests {
    workload: Workload,
    recorded: Option<RecordedTrace>, // Its sessions replace the workload's sessions.
    only: Option<usize>,             // The index of the only class to send.
}

/// What a run sends, and when.
pub(super) struct LoadPlan<'a> {
    /// The requests.
    pub(super) requests: &'a RunRequests,
    /// The seed of the sessions.
    pub(super) seed: u64,
    /// When sessions start, and how many.
    pub(super) schedule: LoadSchedule,
    /// What the live view says first.
    pub(super) title: String,
}

/// What all tasks of a run share.
struct RunTasks {
    target: TargetServer,
    classes: Vec<&'static str>,
    started_sessions: AtomicU64,
    started_requests: Arc<AtomicU64>, // The live view reads it.
    ended: mpsc::UnboundedSender<EndedRequest>,
}

impl RunRequests {
    /// Returns the requests that the flags describe.
    ///
    /// # Errors
    /// If the flags do not fit, or if the trace file cannot be read.
    pub(super) fn new(args: &WorkloadArgs, client: &ClientArgs) -> Result<RunRequests, String> {
        let recorded = args.recorded()?;
        let workload = match &recorded {
            Some(trace) => trace.workload(),
            None => args.workload(),
        };
        client.check_keys(&workload)?;
        Ok(RunRequests {
            only: workload.only_class(args.only.as_deref())?,
            workload,
            recorded,
        })
    }

    fn trace(&self, seed: u64, rate: f64) -> Trace {
        let trace = match &self.recorded {
            Some(recorded) => Trace::recorded(recorded),
            None => Trace::new(&self.workload, seed, rate),
        };
        trace.only(self.only)
    }
}

/// Sends the requests of `plan` to `target` and records how they end. Shows a live view if stderr
/// is a terminal.
pub(super) async fn run_load(target: &TargetServer, plan: &LoadPlan<'_>) -> RunRecord {
    let schedule = plan.schedule;
    let rate = match schedule.source {
        LoadSource::Rate(rate) => rate,
        // Clients take the sessions in order, whatever their time. A trace file has its own times.
        LoadSource::Clients(_) | LoadSource::Trace { .. } => 1.0,
    };
    let trace = plan.requests.trace(plan.seed, rate);
    let trace = trace.requests(schedule.all_requests());
    let (ended, received) = mpsc::unbounded_channel();
    let started = Arc::new(AtomicU64::new(0));
    let classes = plan.requests.workload.classes.iter();
    let tasks = Arc::new(RunTasks {
        target: target.clone(),
        classes: classes.map(|class| class.name).collect(),
        started_sessions: AtomicU64::new(0),
        started_requests: started.clone(),
        ended,
    });
    let start = Instant::now();
    match schedule.source {
        LoadSource::Clients(clients) => tasks.closed_loop(trace, clients, &schedule, start),
        LoadSource::Rate(_) | LoadSource::Trace { .. } => tasks.open_loop(trace, &schedule, start),
    }
    let counts = || LiveCounts {
        started: started.load(Ordering::Relaxed),
        pieces: target.client.pieces(),
    };
    let view = LiveView::new(&plan.title, schedule.requests, schedule.warm_up);
    let record = RunRecord::new(start, schedule.warm_up);
    record_run(received, record, counts, view).await
}

/// Records requests as they end. Every 200 ms it updates the view.
async fn record_run(
    mut ended: mpsc::UnboundedReceiver<EndedRequest>,
    mut record: RunRecord,
    counts: impl Fn() -> LiveCounts,
    mut view: LiveView,
) -> RunRecord {
    let mut tick = interval(Duration::from_millis(200));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            request = ended.recv() => {
                let Some(request) = request else { break };
                view.ended(&request);
                record.add(request);
            }
            _ = tick.tick() => view.show(counts()),
        }
    }
    view.close();
    record
}

impl RunTasks {
    /// Starts `clients` tasks. Each starts its next session when its last one has ended.
    fn closed_loop(
        self: Arc<Self>,
        trace: Trace,
        clients: u64,
        schedule: &LoadSchedule,
        start: Instant,
    ) {
        let trace = Arc::new(Mutex::new(trace));
        let last = schedule
            .seconds
            .map(|seconds| start + seconds_long(seconds));
        for client in 0..clients {
            let (run, trace) = (self.clone(), trace.clone());
            let share = client as f64 / clients as f64;
            let first = start + seconds_long(schedule.ramp_seconds * share);
            tokio::spawn(async move {
                sleep_until(first.into()).await;
                while last.is_none_or(|last| Instant::now() < last) {
                    let session = trace.lock().expect("a trace does not panic").next();
                    match session {
                        Some(session) => run.session(&session, Instant::now()).await,
                        None => return,
                    }
                }
            });
        }
    }

    /// Starts each session at its time, counted from `start`.
    fn open_loop(self: Arc<Self>, trace: Trace, schedule: &LoadSchedule, start: Instant) {
        let trace = trace
            .ramp(schedule.ramp_seconds)
            .seconds(schedule.seconds.unwrap_or(f64::INFINITY));
        tokio::spawn(async move {
            for session in trace {
                let intended = start + seconds_long(session.at);
                sleep_until(intended.into()).await;
                let run = self.clone();
                tokio::spawn(async move { run.session(&session, intended).await });
            }
        });
    }

    /// Runs a session turn by turn until an answer is incomplete. The first turn should start at
    /// `intended`.
    async fn session(&self, session: &Session, mut intended: Instant) {
        let number = self.started_sessions.fetch_add(1, Ordering::Relaxed);
        let mut conversation = ChatHistory::new(&self.target.settings, session);
        for (index, turn) in session.turns.iter().enumerate() {
            if index > 0 {
                intended = Instant::now() + seconds_long(turn.think);
                sleep_until(intended.into()).await;
            }
            let request = conversation.request(turn);
            let identity = RequestIdentity {
                number: self.started_requests.fetch_add(1, Ordering::Relaxed),
                session: number,
                turn: index,
                class: self.classes[session.class],
                tenant: session.tenant,
                is_slow: request.is_slow,
            };
            let sent = Instant::now();
            let outcome = self.target.client.chat(&request, intended).await;
            let text = match &outcome {
                ChatOutcome::Complete(answer) => Some(answer.text.clone()),
                _ => None,
            };
            // Sending fails only if the run has ended.
            let _ = self.ended.send(EndedRequest {
                identity,
                intended,
                sent,
                ended: Instant::now(),
                outcome,
            });
            match text {
                Some(text) => conversation.answered(text),
                None => return,
            }
        }
    }
}

fn seconds_long(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::client::{ChatClient, ChatOptions};
    use crate::drive::conversation::ConversationSettings;
    use crate::drive::prompt_text::TextScale;
    use crate::workload::named;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    const ANSWER: &str = concat!(
        "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n",
        r#"data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}"#,
        "\n\n",
        r#"data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}"#,
        "\n\ndata: [DONE]\n\n"
    );

    /// Returns a client of a server that answers every request at once.
    async fn target() -> TargetServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let mut request = Vec::new();
                while !request.ends_with(b"}") {
                    socket.read_buf(&mut request).await.unwrap();
                }
                socket.write_all(ANSWER.as_bytes()).await.unwrap();
                socket.shutdown().await.unwrap();
            }
        });
        let options = ChatOptions {
            temperature: 0.0,
            ignore_eos: false,
            timeout: Duration::from_secs(60),
            slow_pause: Duration::ZERO,
        };
        let client = ChatClient::connect(&url, Some("m".into()), None, options).await;
        TargetServer {
            client: Arc::new(client.unwrap()),
            settings: Arc::new(ConversationSettings {
                scale: TextScale {
                    tokens_per_word: 1.0,
                    template_tokens: 0,
                },
                exact_length: false,
                slow_fraction: 0.0,
                keys: Vec::new(),
            }),
        }
    }

    #[tokio::test]
    async fn an_open_loop_that_is_late_counts_from_the_intended_start() {
        const LATE: Duration = Duration::from_secs(5);
        let (ended, mut received) = mpsc::unbounded_channel();
        let tasks = Arc::new(RunTasks {
            target: target().await,
            classes: vec!["chat"],
            started_sessions: AtomicU64::new(0),
            started_requests: Arc::default(),
            ended,
        });
        let schedule = LoadSchedule {
            source: LoadSource::Rate(1e6),
            ramp_seconds: 0.0,
            requests: Some(20),
            seconds: None,
            warm_up: 0,
        };
        let workload = named("questions").unwrap();
        let trace = Trace::new(&workload, 1, 1e6).requests(20);
        let start = Instant::now() - LATE;
        tasks.open_loop(trace, &schedule, start);
        let mut record = RunRecord::new(start, 0);
        while let Some(request) = received.recv().await {
            record.add(request);
        }
        assert_eq!(record.requests.len(), 20);
        for request in &record.requests {
            // The sessions arrive within a few microseconds.
            let almost = LATE.as_secs_f64() - 0.01;
            let answer = request.answer().unwrap();
            assert!(request.start_seconds < 0.01, "{request:?}");
            assert!(request.late_seconds > almost, "{request:?}");
            assert!(answer.first_token_seconds.unwrap() > almost, "{request:?}");
            assert!(answer.end_to_end_seconds > almost, "{request:?}");
        }
    }
}
