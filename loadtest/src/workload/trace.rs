//! The sessions of a workload in the order of their start.

use sterna_random::Random;

use super::definition::{Arrivals, SessionClass, Workload};
use super::distributions::{Zipf, exponential, stream};
use super::recorded::RecordedTrace;
use super::session::{Session, SessionKey};

/// Iterates over the sessions of a workload in the order of their start.
#[derive(Debug)]
pub(crate) struct Trace {
    source: SessionSource,
    requests_left: u64,
    seconds: f64,
    ramp: f64,
    only: Option<usize>,
}

/// Where sessions come from.
#[derive(Debug)]
enum SessionSource {
    Classes(Vec<ClassSessions>),
    Recorded(std::iter::Peekable<std::vec::IntoIter<Session>>),
}

/// The sessions of one class.
#[derive(Debug)]
struct ClassSessions {
    class: SessionClass,
    next: SessionKey,
    rate: f64, // Sessions per second, on average.
    random: Random,
    tenants: Zipf,
    at: f64,
    is_burst: bool,
    phase_ends: f64,
}

impl Trace {
    /// Draws sessions with `seed`. They start at `rate` per second over all classes.
    pub(crate) fn new(workload: &Workload, seed: u64, rate: f64) -> Trace {
        let shares: f64 = workload.classes.iter().map(|class| class.share).sum();
        let sessions = |(index, class): (usize, &SessionClass)| {
            ClassSessions::new(class, (seed, index), rate * class.share / shares)
        };
        let classes = workload.classes.iter().enumerate();
        Trace::from(SessionSource::Classes(classes.map(sessions).collect()))
    }

    /// Returns the sessions of a trace file.
    pub(crate) fn recorded(trace: &RecordedTrace) -> Trace {
        let sessions = trace.sessions().to_vec();
        Trace::from(SessionSource::Recorded(sessions.into_iter().peekable()))
    }

    fn from(source: SessionSource) -> Trace {
        Trace {
            source,
            requests_left: u64::MAX,
            seconds: f64::INFINITY,
            ramp: 0.0,
            only: None,
        }
    }

    /// Ends the trace after `requests` turns of all classes.
    pub(crate) fn requests(mut self, requests: u64) -> Trace {
        self.requests_left = requests;
        self
    }

    /// Ends the trace before the first session that starts after `seconds`.
    pub(crate) fn seconds(mut self, seconds: f64) -> Trace {
        self.seconds = seconds;
        self
    }

    /// Lets the rate grow from 0 to its full size during the first `seconds`.
    pub(crate) fn ramp(mut self, seconds: f64) -> Trace {
        self.ramp = seconds;
        self
    }

    /// Leaves out the sessions of all other classes. The limits still count their turns, so the
    /// sessions of `class` are the same as without this filter.
    pub(crate) fn only(mut self, class: Option<usize>) -> Trace {
        self.only = class;
        self
    }

    fn next_of_any_class(&mut self) -> Option<Session> {
        let at = self.source.next_start()?;
        if self.requests_left == 0 || ramped(at, self.ramp) > self.seconds {
            return None;
        }
        let mut session = self.source.next_session()?;
        session.at = ramped(session.at, self.ramp);
        let turns = self.requests_left.min(session.turns.len() as u64);
        session.turns.truncate(turns as usize);
        self.requests_left -= turns;
        Some(session)
    }
}

impl SessionSource {
    /// Returns when the next session starts.
    fn next_start(&mut self) -> Option<f64> {
        match self {
            SessionSource::Classes(classes) => first(classes).map(|class| class.at),
            SessionSource::Recorded(sessions) => sessions.peek().map(|session| session.at),
        }
    }

    fn next_session(&mut self) -> Option<Session> {
        match self {
            SessionSource::Classes(classes) => first(classes).map(ClassSessions::next_session),
            SessionSource::Recorded(sessions) => sessions.next(),
        }
    }
}

/// Returns the class whose next session starts first.
fn first(classes: &mut [ClassSessions]) -> Option<&mut ClassSessions> {
    classes.iter_mut().min_by(|a, b| a.at.total_cmp(&b.at))
}

/// Returns when a session starts that would start at `at` without the ramp.
///
/// Until the time t of the ramp T, as many sessions start as at full rate until t² / 2T. So the
/// kind of the arrivals stays the same.
fn ramped(at: f64, ramp: f64) -> f64 {
    if at < ramp / 2.0 {
        (2.0 * ramp * at).sqrt()
    } else {
        at + ramp / 2.0
    }
}

impl Iterator for Trace {
    type Item = Session;

    fn next(&mut self) -> Option<Session> {
        loop {
            let session = self.next_of_any_class()?;
            if self.only.is_none_or(|class| session.class == class) {
                return Some(session);
            }
        }
    }
}

impl ClassSessions {
    fn new(class: &SessionClass, (seed, index): (u64, usize), rate: f64) -> ClassSessions {
        let mut sessions = ClassSessions {
            tenants: Zipf::new(class.tenants.count, class.tenants.zipf),
            class: class.clone(),
            next: SessionKey {
                seed,
                class: index,
                index: 0,
            },
            rate,
            random: stream(seed, u64::MAX - index as u64),
            at: class.starts_at,
            is_burst: true, // The first phase has length 0, so the class starts with a calm phase.
            phase_ends: class.starts_at,
        };
        sessions.advance();
        sessions
    }

    fn next_session(&mut self) -> Session {
        let session = Session::draw(&self.class, &self.tenants, self.next, self.at);
        self.next.index += 1;
        self.advance();
        session
    }

    /// Moves on to the next arrival.
    fn advance(&mut self) {
        match self.class.arrivals {
            Arrivals::Steady => self.at += 1.0 / self.rate,
            Arrivals::Poisson => self.at += exponential(&mut self.random, 1.0 / self.rate),
            Arrivals::Bursts {
                calm,
                burst,
                factor,
            } => self.advance_in_bursts(calm, burst, factor),
        }
    }

    /// Moves on to the next arrival of a process with bursts. A Poisson process has no memory, so
    /// an arrival that would fall into the next phase is drawn again in that phase.
    fn advance_in_bursts(&mut self, calm: f64, burst: f64, factor: f64) {
        let calm_rate = self.rate * (calm + burst) / (calm + burst * factor);
        loop {
            let rate = if self.is_burst {
                calm_rate * factor
            } else {
                calm_rate
            };
            let at = self.at + exponential(&mut self.random, 1.0 / rate);
            if at <= self.phase_ends {
                self.at = at;
                return;
            }
            self.at = self.phase_ends;
            self.is_burst = !self.is_burst;
            let mean = if self.is_burst { burst } else { calm };
            self.phase_ends += exponential(&mut self.random, mean);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{STOP, named, names};

    fn sessions(name: &str, seed: u64) -> Vec<Session> {
        let workload = named(name).unwrap();
        Trace::new(&workload, seed, 5.0).requests(2000).collect()
    }

    #[test]
    fn equal_seeds_give_equal_traces() {
        for name in names() {
            assert_eq!(sessions(name, 7), sessions(name, 7), "{name}");
            assert_ne!(sessions(name, 7), sessions(name, 8), "{name}");
        }
    }

    #[test]
    fn sessions_start_in_order_and_at_the_requested_rate() {
        for arrivals in [
            Arrivals::Poisson,
            Arrivals::Steady,
            Arrivals::Bursts {
                calm: 5.0,
                burst: 1.0,
                factor: 10.0,
            },
        ] {
            let class = SessionClass {
                arrivals,
                ..SessionClass::default()
            };
            let workload = Workload {
                classes: vec![class],
                ..named("chat").unwrap()
            };
            let trace = Trace::new(&workload, 3, 10.0).requests(20_000);
            let at: Vec<f64> = trace.map(|session| session.at).collect();
            assert!(at.is_sorted());
            let seconds = at.last().unwrap();
            assert!(
                (1_850.0..2_150.0).contains(seconds),
                "{arrivals:?}: {seconds}"
            );
        }
    }

    #[test]
    fn a_ramp_starts_half_as_many_sessions_in_its_time() {
        let workload = named("questions").unwrap();
        let started = |trace: Trace, from: f64, to: f64| {
            let at = trace.map(|session| session.at);
            at.filter(|at| (from..to).contains(at)).count()
        };
        let ramp = || Trace::new(&workload, 3, 100.0).ramp(100.0).seconds(200.0);
        let quarter = started(ramp(), 0.0, 50.0);
        assert!((1_100..1_400).contains(&quarter), "{quarter}");
        let ramped = started(ramp(), 0.0, 100.0);
        assert!((4_700..5_300).contains(&ramped), "{ramped}");
        let full = started(ramp(), 100.0, 200.0);
        assert!((9_600..10_400).contains(&full), "{full}");
    }

    #[test]
    fn a_turn_repeats_the_conversation_so_far() {
        let sessions = sessions("chat", 1);
        let session = sessions.iter().find(|session| session.turns.len() > 1);
        let session = session.unwrap();
        let (first, second) = (session.prompt(0), session.prompt(1));
        assert_eq!(first.len() as u32, session.prompt_len(0));
        assert_eq!(second.len() as u32, session.prompt_len(1));
        assert!(second.starts_with(&first));
        let answer = &second[first.len()..][..session.turns[0].answer.tokens as usize];
        assert_eq!(answer.last(), Some(&STOP));
        assert_eq!(answer[0], session.turns[0].answer_token(0));
    }

    #[test]
    fn the_flooder_makes_nine_of_ten_arrivals() {
        let sessions = sessions("flooder", 1);
        let floods = sessions
            .iter()
            .filter(|session| session.tenant == 0)
            .count();
        assert!((1750..1850).contains(&floods), "{floods}");
    }
}
